"""Tokens and log probabilities against PEFT's."""
