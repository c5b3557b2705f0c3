"""Source weights inside other people's trainers: Hugging Face's ``Trainer``, TRL's, and Lightning's."""
