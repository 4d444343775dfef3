//! Encodes guest names as names of files and keys, and makes tokens.

use crate::claim::random_number;

/// Encodes every byte except ASCII letters, digits, `-` and `_` as `%XX`.
///
/// The dot and the slash are encoded, too, so a name cannot leave its directory.
pub(crate) fn encoded(name: &str) -> String {
    let mut text = String::with_capacity(name.len());
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_') {
            text.push(char::from(byte));
        } else {
            text.push_str(&format!("%{byte:02X}"));
        }
    }
    text
}

/// Returns a random, unique token of 32 hexadecimal digits.
pub(crate) fn token() -> String {
    format!("{:016x}{:016x}", random_number(), random_number())
}

/// Whether a text has the form of [`token`].
pub(crate) fn is_token(text: &str) -> bool {
    text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Quotes the first 400 characters of foreign text so that they are safe to print.
pub(crate) fn quoted(bytes: &[u8]) -> String {
    const MOST: usize = 400;
    let text = String::from_utf8_lossy(bytes);
    let short: String = text.trim().chars().take(MOST).collect();
    let rest = if short.len() < text.trim().len() { "…" } else { "" };
    format!("{short:?}{rest}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_names_differ_if_names_do_and_hide_nothing() {
        assert_eq!(encoded("web-1_a"), "web-1_a");
        assert_eq!(encoded("../a b%41"), "%2E%2E%2Fa%20b%2541");
    }

    #[test]
    fn quoted_text_is_short_and_printable() {
        assert_eq!(quoted(b" a\x1b[2J\n"), r#""a\u{1b}[2J""#);
        assert!(quoted(&[b'x'; 5000]).len() < 420);
    }
}
