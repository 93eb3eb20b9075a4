"""Where people already are: scikit-learn, Lightning, transformers, BoTorch, export, laplace-torch; no mathematics"""
