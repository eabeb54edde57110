"""What only the notebooks need: their folders, their dataset, questions, animations, receipts."""
