"""Statistics of measurements as plain numbers: no database, no run, no words of a verdict.

Each question has its own method, as the data differ: `changes` judges one series night by night,
`paired` sessions of two sides that took turns, and `unpaired` two sides that did not.
"""
