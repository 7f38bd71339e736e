"""State that the workers of one gateway share, in Redis or, with one worker, in memory: messages (`peers`), sums over
sliding windows (`windows`), and the metrics that each of them counts."""
