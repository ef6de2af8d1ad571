"""From text to token batches: chat rows, the target's own conversations, prompts, the store."""
