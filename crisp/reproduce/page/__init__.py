"""The page that goes through the paper's claims, with its pictures."""
