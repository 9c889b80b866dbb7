"""From a conversation to tokens, and from tokens to text: rules, templates, tokenizers, streams."""
