//! The few elements of S3's messages that `rusty-s3` does not decode.

/// The text of the first element of this name.
pub(crate) fn element<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let (open, close) = (format!("<{name}>"), format!("</{name}>"));
    let (_, rest) = text.split_once(&open)?;
    rest.split_once(&close).map(|(inside, _)| inside)
}

/// The texts of all elements of this name.
pub(crate) fn elements<'a>(text: &'a str, name: &str) -> Vec<&'a str> {
    let (open, close) = (format!("<{name}>"), format!("</{name}>"));
    text.split(&open).skip(1).filter_map(|part| part.split_once(&close)).map(|(inside, _)| inside).collect()
}

/// Replaces the five entities of XML.
pub(crate) fn unescaped(text: &str) -> String {
    let text = text.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"").replace("&apos;", "'");
    text.replace("&#34;", "\"").replace("&#39;", "'").replace("&amp;", "&")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_found_in_their_order() {
        let text = "<R><Upload><Key>a&amp;b</Key></Upload><Upload><Key>c</Key></Upload></R>";

        let uploads = elements(text, "Upload");
        assert_eq!(uploads.len(), 2);
        assert_eq!(unescaped(element(uploads[0], "Key").unwrap()), "a&b");
        assert_eq!(element(text, "Other"), None);
        assert_eq!(element("<Key>cut", "Key"), None);
    }
}
