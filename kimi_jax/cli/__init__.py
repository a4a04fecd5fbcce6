"""What main.py does: arguments, prompts, the run, the report. No maths."""
