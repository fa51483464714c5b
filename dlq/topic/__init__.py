"""Dead letters in topics: written by consumers without a database, collected into the store."""
