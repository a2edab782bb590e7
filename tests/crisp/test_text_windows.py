from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crisp.errors import CrispError
from crisp.text_windows import TokenWindows, check_texts, opening_ids, read_windows

BOS = [7, 8]


class Letters:
    """A token for each character; ``before`` stands in front of a text."""

    def __init__(self, before: list[int] | None = None) -> None:
        self.before = before or []

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        ids = [ord(character) for character in text]
        return {"input_ids": (self.before if add_special_tokens else []) + ids}


def cut(folder: Path, *texts: str, before: list[int] | None = None, **how: Any) -> TokenWindows:
    paths = []
    for number, text in enumerate(texts):
        paths.append(folder / f"text {number}.txt")
        paths[-1].write_text(text, encoding="utf-8")
    return read_windows(Letters(before), paths, **how)


def words(windows: TokenWindows) -> list[str]:
    return ["".join(map(chr, tokens)) for tokens in windows.tokens]


def scored(windows: TokenWindows) -> list[str]:
    return [word[len(word) - n :] for word, n in zip(words(windows), windows.scored, strict=True)]


def test_windows_overlap_by_what_the_stride_leaves(tmp_path: Path) -> None:
    windows = cut(tmp_path, "abcdefghijk", window=5, stride=2)
    assert words(windows) == ["abcde", "cdefg", "efghi", "ghijk"]
    assert scored(windows) == ["bcde", "fg", "hi", "jk"]
    assert (windows.n_scored, windows.n_fed) == (10, 20)
    assert (windows.window, windows.stride) == (5, 2)


def test_a_short_window_ends_a_text(tmp_path: Path) -> None:
    windows = cut(tmp_path, "abcdefgh", window=5, stride=2)
    assert words(windows) == ["abcde", "cdefg", "efgh"]
    assert scored(windows) == ["bcde", "fg", "h"]


def test_without_overlap_the_first_token_of_a_window_is_unscored(tmp_path: Path) -> None:
    windows = cut(tmp_path, "abcdefgh", window=3)
    assert words(windows) == ["abc", "def", "gh"]
    assert scored(windows) == ["bc", "ef", "h"]
    # of a single token nothing could be scored
    assert words(cut(tmp_path, "abcdefg", window=3)) == ["abc", "def"]


def test_what_the_tokenizer_puts_before_a_text_opens_every_window(tmp_path: Path) -> None:
    windows = cut(tmp_path, "abcdefg", before=BOS, window=5, stride=2)
    assert [tokens[:2].tolist() for tokens in windows.tokens] == [BOS] * 3
    assert [word[2:] for word in words(windows)] == ["abc", "cde", "efg"]
    assert scored(windows) == ["abc", "de", "fg"]
    # a stride of the whole window would leave two tokens out between windows
    whole = cut(tmp_path, "abcdefg", before=BOS, window=5)
    assert (scored(whole), whole.stride) == (["abc", "def", "g"], 3)
    assert opening_ids(Letters(BOS)) == BOS


def test_a_tokenizer_without_letters_is_refused() -> None:
    def digits(text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": BOS if add_special_tokens else []}

    with pytest.raises(CrispError, match="makes no token of the letter a"):
        opening_ids(digits)


def test_a_device_is_no_text() -> None:
    with pytest.raises(CrispError, match="/dev/zero: is a device; a text was expected"):
        check_texts([Path("/dev/zero")])


def test_texts_are_kept_apart(tmp_path: Path) -> None:
    windows = cut(tmp_path, "abcd", "ABCDE", window=4, stride=2)
    assert words(windows) == ["abcd", "ABCD", "CDE"]
    assert windows.text == [0, 1, 1]
    assert windows.names == ["text 0.txt", "text 1.txt"]
    # sha256 of "abcd", as sha256sum prints it
    assert windows.dataset[0].endswith(
        "sha256:88d4266fd4e6338d13b845fcf289579d209c897823b9217da3e161936f031589"
    )


def test_a_limit_is_shared_by_the_texts(tmp_path: Path) -> None:
    windows = cut(tmp_path, "abcdefgh", "ABCDEFGH", window=3, stride=2, limit=9)
    assert words(windows) == ["abc", "cde", "ABC", "CD"]


@given(st.integers(2, 9), st.integers(1, 8), st.integers(9, 40), st.booleans())
def test_every_token_but_the_first_is_scored_once(
    tmp_path_factory: pytest.TempPathFactory, window: int, stride: int, length: int, led: bool
) -> None:
    text = "".join(chr(200 + i) for i in range(length))
    before = [1] if led else []
    windows = cut(
        tmp_path_factory.mktemp("texts"),
        text,
        before=before,
        window=window,
        stride=min(stride, window - 1),
    )
    assert "".join(scored(windows)) == (text if led else text[1:])
    for tokens, fresh in zip(windows.tokens, windows.scored, strict=True):
        assert 2 <= len(tokens) <= window
        assert 1 <= fresh < len(tokens)


@pytest.mark.parametrize(
    ("text", "how", "message"),
    [
        ("abc", {"window": 4}, "text 0.txt: 3 tokens, shorter than a window of 4"),
        ("", {"window": 4}, "text 0.txt: 0 tokens"),
        ("abc", {"window": 1}, "--window 1: expected 2 or more"),
        ("abc", {"window": 2, "before": BOS}, "--window 2: expected 3 or more"),
        ("abcdef", {"window": 4, "stride": 5}, "--stride 5: expected 1 to the window's 4 tokens"),
        ("abcdef", {"window": 4, "stride": 0}, "--stride 0"),
        ("abcdef", {"window": 4, "limit": 3}, "--tokens 3: 3 for each of 1 texts"),
    ],
)
def test_windows_that_cannot_be_cut(
    tmp_path: Path, text: str, how: dict[str, Any], message: str
) -> None:
    with pytest.raises(CrispError) as error:
        cut(tmp_path, text, **how)
    assert message in str(error.value)


def test_files_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for name, message in (("none.txt", "cannot be read"), ("latin.txt", r"is not UTF-8 .*byte 3")):
        with pytest.raises(CrispError, match=f"{name}: {message}"):
            read_windows(Letters(), [tmp_path / name], 2)
