//! A client's distinguished name, and the rules that allow or deny it.

use rustls::pki_types::CertificateDer;

/// Rules for client names. The first matching rule decides (QEMU's `authz-simple` and `authz-list`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Authorization {
    /// Rules in the order in which they are tried.
    pub rules: Vec<AuthorizationRule>,
    /// Whether a name is allowed that no rule matches.
    pub otherwise: bool,
}

/// One rule of an [`Authorization`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuthorizationRule {
    /// A distinguished name, such as `CN=host,O=Example`.
    pub pattern: String,
    /// Whether `*` and `?` in the pattern are wildcards.
    pub is_glob: bool,
    /// Whether matching names are allowed.
    pub allow: bool,
}

impl Authorization {
    /// Makes rules that allow exactly one name.
    pub fn only(name: &str) -> Authorization {
        let rule = AuthorizationRule { pattern: name.to_owned(), is_glob: false, allow: true };
        Authorization { rules: vec![rule], otherwise: false }
    }

    /// Whether `name` is allowed.
    pub fn allows(&self, name: &str) -> bool {
        let fits = |rule: &&AuthorizationRule| {
            if rule.is_glob { glob(rule.pattern.as_bytes(), name.as_bytes()) } else { rule.pattern == name }
        };
        self.rules.iter().find(fits).map_or(self.otherwise, |rule| rule.allow)
    }
}

/// Matches `*` to any bytes and `?` to one. Time grows with the product of the lengths, for every pattern.
fn glob(pattern: &[u8], name: &[u8]) -> bool {
    let (mut at, mut from) = (0, 0);
    let mut star = None;
    while from < name.len() {
        match pattern.get(at) {
            Some(b'*') => {
                star = Some((at, from));
                at += 1;
            }
            Some(byte) if *byte == b'?' || *byte == name[from] => {
                at += 1;
                from += 1;
            }
            _ => {
                let Some((star_at, taken)) = star else { return false };
                star = Some((star_at, taken + 1));
                at = star_at + 1;
                from = taken + 1;
            }
        }
    }
    pattern[at..].iter().all(|byte| *byte == b'*')
}

/// The subject of a certificate as QEMU prints it: `C=GB,O=Example,CN=host`.
///
/// The spelling is RFC 4514's, but the order is the certificate's.
pub(super) fn subject(certificate: &CertificateDer<'_>) -> Option<String> {
    let parsed = webpki::EndEntityCert::try_from(certificate).ok()?;
    let mut sets = parsed.subject();
    let mut parts = Vec::new();
    while !sets.is_empty() {
        let mut set = take(&mut sets, 0x31)?;
        let mut together = Vec::new();
        while !set.is_empty() {
            let mut pair = take(&mut set, 0x30)?;
            let kind = take(&mut pair, 0x06)?;
            let (_, value) = element(&mut pair)?;
            together.push(format!("{}={}", attribute(kind), escape(&String::from_utf8_lossy(value))));
        }
        parts.push(together.join("+"));
    }
    Some(parts.join(","))
}

/// Takes the content of the DER element at the front, which must have `tag`.
fn take<'a>(bytes: &mut &'a [u8], tag: u8) -> Option<&'a [u8]> {
    element(bytes).filter(|(found, _)| *found == tag).map(|(_, content)| content)
}

fn element<'a>(bytes: &mut &'a [u8]) -> Option<(u8, &'a [u8])> {
    let (&tag, rest) = bytes.split_first()?;
    let (&first, rest) = rest.split_first()?;
    let (len, rest) = match first {
        0..=0x7f => (usize::from(first), rest),
        0x81 => rest.split_first().map(|(len, rest)| (usize::from(*len), rest))?,
        0x82 => {
            let (len, rest) = rest.split_at_checked(2)?;
            (usize::from(u16::from_be_bytes([len[0], len[1]])), rest)
        }
        // Names with longer lengths do not occur.
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(len)?;
    *bytes = rest;
    Some((tag, content))
}

fn attribute(oid: &[u8]) -> String {
    let known = match oid {
        [0x55, 0x04, 0x03] => "CN",
        [0x55, 0x04, 0x05] => "serialNumber",
        [0x55, 0x04, 0x06] => "C",
        [0x55, 0x04, 0x07] => "L",
        [0x55, 0x04, 0x08] => "ST",
        [0x55, 0x04, 0x09] => "STREET",
        [0x55, 0x04, 0x0a] => "O",
        [0x55, 0x04, 0x0b] => "OU",
        [0x55, 0x04, 0x0c] => "title",
        [0x09, 0x92, 0x26, 0x89, 0x93, 0xf2, 0x2c, 0x64, 0x01, 0x01] => "UID",
        [0x09, 0x92, 0x26, 0x89, 0x93, 0xf2, 0x2c, 0x64, 0x01, 0x19] => "DC",
        [0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x09, 0x01] => "EMAIL",
        _ => return dotted(oid),
    };
    known.to_owned()
}

fn dotted(oid: &[u8]) -> String {
    let mut numbers = Vec::new();
    let mut number: u64 = 0;
    for byte in oid {
        number = number.wrapping_shl(7) | u64::from(byte & 0x7f);
        if byte & 0x80 == 0 {
            if numbers.is_empty() {
                let first = (number / 40).min(2);
                numbers.push(first);
                number -= first * 40;
            }
            numbers.push(number);
            number = 0;
        }
    }
    numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(".")
}

fn escape(value: &str) -> String {
    let mut out = String::with_capacity(value.len());
    for (index, c) in value.char_indices() {
        let at_end = index + c.len_utf8() == value.len();
        if matches!(c, ',' | '+' | '"' | '\\' | '<' | '>' | ';')
            || (index == 0 && matches!(c, '#' | ' '))
            || (at_end && c == ' ')
        {
            out.push('\\');
        }
        out.push(c);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn glob_every_kind_of_pattern_matches_as_it_says() {
        for (pattern, name, fits) in [
            ("CN=a", "CN=a", true),
            ("CN=a", "CN=ab", false),
            ("*", "", true),
            ("CN=*.example,O=*", "CN=one.example,O=X", true),
            ("CN=*.example,O=*", "CN=one.example.org,O=X", false),
            ("C?=a", "CN=a", true),
            ("*a*b", "xaxxab", true),
            ("*a*b", "xaxxa", false),
        ] {
            assert_eq!(glob(pattern.as_bytes(), name.as_bytes()), fits, "{pattern} {name}");
        }
    }

    #[test]
    fn authorization_the_first_rule_that_fits_decides() {
        let rule =
            |pattern: &str, is_glob, allow| AuthorizationRule { pattern: pattern.to_owned(), is_glob, allow };
        let list = Authorization {
            rules: vec![rule("CN=bad", false, false), rule("CN=*", true, true)],
            otherwise: false,
        };

        assert!(list.allows("CN=good"));
        assert!(!list.allows("CN=bad"));
        assert!(!list.allows("O=else"));
        assert!(Authorization::only("CN=x").allows("CN=x"));
        assert!(!Authorization::only("CN=*").allows("CN=x"), "no glob unless asked for");
    }

    #[test]
    fn element_lengths_that_lie_are_refused() {
        for bytes in [&[0x31][..], &[0x31, 5, 0], &[0x31, 0x82, 1], &[0x31, 0x84, 0, 0, 0, 0], &[0x31, 0x81]]
        {
            assert_eq!(element(&mut &bytes[..]), None, "{bytes:?}");
        }
    }

    #[test]
    fn dotted_an_unknown_attribute_is_named_by_number() {
        assert_eq!(dotted(&[0x55, 0x04, 0x2a]), "2.5.4.42");
        assert_eq!(dotted(&[0x2a, 0x86, 0x48]), "1.2.840");
    }
}
