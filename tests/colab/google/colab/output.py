"""What Colab shows below a cell."""

from google.colab import _message

__all__ = ["clear", "enable_custom_widget_manager", "eval_js"]


def clear(wait=False, output_tags=()):
    """Clear the output of this cell."""
    from IPython.display import clear_output

    clear_output(wait=wait)


def eval_js(script, ignore_result=False, timeout_sec=None):
    """Run a script in the browser."""
    _message.blocking_request("eval_js")


def enable_custom_widget_manager():
    """Load widgets from other packages: some of the standard ones vanish with it."""
    raise NotImplementedError("a notebook must do with the widgets that Colab has")
