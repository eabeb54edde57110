"""Every figure and page that a person sees."""
