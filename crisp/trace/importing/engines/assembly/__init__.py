"""Parts that readers of logs share: containers, rows, forward passes, batches."""
