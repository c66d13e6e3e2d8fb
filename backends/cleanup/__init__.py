"""What a killed process leaves behind, and who removes it."""
