"""Two questions about one real document, put to a real daemon."""
