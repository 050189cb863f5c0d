"""The implementation of a model by the classes of transformers, over Baton's pages."""
