"""Texts as tokens of a pretrained model: tokenised once, cached, and batched by length."""
