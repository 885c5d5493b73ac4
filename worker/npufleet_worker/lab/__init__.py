"""What is tried with a model before it serves: how fast it is, and how exact. No traffic here."""
