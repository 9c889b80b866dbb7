"""Texts to vectors: MiniLM in numpy (:mod:`.minilm`), any endpoint that speaks OpenAI's (:mod:`.remote`)."""
