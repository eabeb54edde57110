"""What only the notebooks need: their folders, their dataset, questions, an exercise's grader,
animations, receipts.
"""
