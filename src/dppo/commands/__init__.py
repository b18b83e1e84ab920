"""What a person types, one file per command."""
