"""Where models come from: names to folders that load fast and offline.

``fetch`` turns a name (an alias, a model hub id, a folder, a ``.gguf`` file) into a ``LocalModel``; ``store``
keeps what was converted, with a digest for every file; ``convert`` turns GGUF into safetensors, once.
Nothing here builds a model: it hands over a folder and the digest of its weights.
"""
