"""What works on the pack: commands, tools that make models and pictures, benchmarks."""
