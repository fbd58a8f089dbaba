"""Where text becomes token ids and token ids become text: tokenizer, detokenizer, stop strings, chat template."""
