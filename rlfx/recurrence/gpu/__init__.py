"""What GPUs do best in another form."""
