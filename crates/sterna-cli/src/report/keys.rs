//! The legend of a picture, as text outside the picture. It wraps when the page is narrow.

use super::svg::escape;

/// A line of keys, each a class of the style sheet and its meaning. Empty without keys.
pub fn keys<'a>(keys: impl IntoIterator<Item = (&'a str, String)>) -> String {
    let items: String = keys
        .into_iter()
        .map(|(class, words)| format!("<span><i class=\"{class}\"></i>{}</span>\n", escape(&words)))
        .collect();
    if items.is_empty() { items } else { format!("<p class=\"keys\">\n{items}</p>\n") }
}
