"""mllm: its ahead-of-time flow, its runners, and what they print."""
