//! Members of JSON objects, byte for byte.

use serde::de::IgnoredAny;
use serde_json::Deserializer;

/// The bytes of member `name` of the object `text`. `None`: it has no such member. An error describes why the text is no
/// object.
pub(super) fn member<'a>(text: &'a [u8], name: &str) -> Result<Option<&'a [u8]>, String> {
    let mut at = expect(text, 0, b'{')?;
    if text.get(at) == Some(&b'}') {
        return Ok(None);
    }
    loop {
        let mut keys = Deserializer::from_slice(&text[at..]).into_iter::<String>();
        let key = keys.next().ok_or("it ends inside of an object")?.map_err(|error| error.to_string())?;
        at = expect(text, at + keys.byte_offset(), b':')?;
        let mut values = Deserializer::from_slice(&text[at..]).into_iter::<IgnoredAny>();
        values.next().ok_or("it ends inside of an object")?.map_err(|error| error.to_string())?;
        let end = at + values.byte_offset();
        if key == name {
            return Ok(Some(&text[at..end]));
        }
        if text.get(skip(text, end)) == Some(&b'}') {
            return Ok(None);
        }
        at = expect(text, end, b',')?;
    }
}

/// The place of the first byte after white space, `wanted` and more white space.
fn expect(text: &[u8], at: usize, wanted: u8) -> Result<usize, String> {
    let at = skip(text, at);
    match text.get(at) {
        Some(byte) if *byte == wanted => Ok(skip(text, at + 1)),
        Some(_) => Err(format!("{:?} is expected at byte {at}", char::from(wanted))),
        None => Err(format!("it ends before {:?}", char::from(wanted))),
    }
}

fn skip(text: &[u8], at: usize) -> usize {
    let rest = text.get(at..).unwrap_or_default();
    at + rest.iter().take_while(|byte| byte.is_ascii_whitespace()).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn member_keeps_its_bytes() {
        let text = br#" { "a" : [1, {"b": 2}], "b":1.50 , "c" : "}" }"#;

        assert_eq!(member(text, "a"), Ok(Some(&b"[1, {\"b\": 2}]"[..])));
        assert_eq!(member(text, "b"), Ok(Some(&b"1.50"[..])));
        assert_eq!(member(text, "c"), Ok(Some(&b"\"}\""[..])));
        assert_eq!(member(text, "d"), Ok(None));
        assert_eq!(member(b"{ }", "d"), Ok(None));
    }

    #[test]
    fn text_that_is_no_object_is_refused() {
        for text in ["", "[]", "{\"a\"", "{\"a\":", "{\"a\":1", "{\"a\":1 \"b\":2}", "{1:2}", "{\"a\":tru}"] {
            assert!(member(text.as_bytes(), "b").is_err(), "{text}");
        }
    }
}
