"""What the answers of each lab are put through, one module a lab. No right answer is in here."""
