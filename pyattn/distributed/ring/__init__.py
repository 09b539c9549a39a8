"""Ring attention: chunks of keys pass from rank to rank."""
