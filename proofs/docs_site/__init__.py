"""The documents as a site: navigation, generated reference, a strict build by Sphinx."""
