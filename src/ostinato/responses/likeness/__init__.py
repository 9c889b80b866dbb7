"""Whether two questions have the same answer: words, guards, and a learned decision over both."""
