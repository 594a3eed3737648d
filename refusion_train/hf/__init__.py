"""The model and decoder that ship in every exported Hugging Face folder; imports nothing of refusion_train."""
