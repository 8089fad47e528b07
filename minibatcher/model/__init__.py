"""The language model: configuration (torch-free), decoder, loader, tokenizer, sampling."""
