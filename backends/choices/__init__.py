"""Which of several ways is taken, by what was timed on this card."""
