"""What turns token ids into logits: the native decoder, and models of transformers behind the same face."""
