//! The address of a libvirt domain.

use std::fmt;
use std::str::FromStr;

/// The connection URI of an address without one.
const SYSTEM: &str = "qemu:///system";

/// A domain of libvirt: `libvirt:NAME`, or `libvirt+URI:NAME` with a connection URI.
///
/// `NAME` is the domain's name or UUID. Without a URI the environment variable `LIBVIRT_DEFAULT_URI` counts, else
/// `qemu:///system`. A name that contains a colon needs its UUID in the form with a URI.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DomainAddress {
    uri: Option<String>,
    name: String,
}

impl DomainAddress {
    /// Whether `text` is meant as the address of a domain, right or wrong.
    pub fn is_meant_by(text: &str) -> bool {
        text.starts_with("libvirt:") || text.starts_with("libvirt+")
    }

    /// The domain's name or UUID.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The connection URI.
    pub fn uri(&self) -> String {
        let default = || std::env::var("LIBVIRT_DEFAULT_URI").ok().filter(|uri| !uri.is_empty());
        self.uri.clone().or_else(default).unwrap_or_else(|| SYSTEM.to_owned())
    }

    /// The `virsh` command line for this domain's daemon, followed by `arguments`, for an operator to copy.
    pub fn virsh(&self, arguments: &str) -> String {
        // For root, virsh's default is the same URI.
        let is_default = self.uri.is_none() && (self.uri() != SYSTEM || rustix::process::geteuid().is_root());
        match is_default {
            true => format!("virsh {arguments}"),
            false => format!("virsh -c {} {arguments}", quoted(&self.uri())),
        }
    }

    /// The name in the form that a shell takes as one word.
    pub fn quoted_name(&self) -> String {
        quoted(&self.name)
    }
}

/// The text as one word of a shell.
fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:+@%,".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

impl FromStr for DomainAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |why: &str| {
            Err(format!(
                "'{text}' is not the address of a domain ({why}); write libvirt:NAME, or libvirt+URI:NAME such as \
                 libvirt+qemu:///session:web1"
            ))
        };
        let (uri, name) = match text.strip_prefix("libvirt+") {
            None => (None, text.strip_prefix("libvirt:").unwrap_or_default()),
            Some(rest) => match rest.rsplit_once(':') {
                Some((uri, name)) if uri.contains(":/") => (Some(uri.to_owned()), name),
                _ => return wrong("it has no URI with a name after it"),
            },
        };
        if name.is_empty() {
            return wrong("the name is empty");
        }
        // A domain's name cannot contain a slash, but the rest of a URI without a name does.
        if name.contains('/') {
            return wrong("a name cannot contain `/`");
        }
        if name.contains(['\0', '\n']) || name.starts_with('-') {
            return wrong("the name cannot be passed to virsh");
        }
        Ok(Self { uri, name: name.to_owned() })
    }
}

impl fmt::Display for DomainAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.uri {
            None => write!(f, "libvirt:{}", self.name),
            Some(uri) => write!(f, "libvirt+{uri}:{}", self.name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_is_parsed_and_shown_alike() {
        for (text, uri, name) in [
            ("libvirt:web1", None, "web1"),
            ("libvirt+qemu:///session:web1", Some("qemu:///session"), "web1"),
            ("libvirt+qemu:///system?socket=/run/a:web 1", Some("qemu:///system?socket=/run/a"), "web 1"),
            ("libvirt+qemu+ssh://h:22/system:web1", Some("qemu+ssh://h:22/system"), "web1"),
        ] {
            let address: DomainAddress = text.parse().unwrap();

            assert_eq!((address.uri.as_deref(), address.name()), (uri, name));
            assert_eq!(address.to_string(), text);
        }
    }

    #[test]
    fn address_without_a_name_or_uri_is_refused() {
        for text in [
            "libvirt:",
            "libvirt+web1",
            "libvirt+:web1",
            "libvirt+qemu:///system",
            "libvirt:a/b",
            "libvirt:-a",
        ] {
            assert!(text.parse::<DomainAddress>().is_err(), "{text}");
        }
    }

    #[test]
    fn virsh_gets_the_uri_of_the_address_and_words_of_a_shell() {
        let address: DomainAddress = "libvirt+qemu:///system?socket=/run/a:it's".parse().unwrap();

        assert_eq!(address.virsh("list"), "virsh -c 'qemu:///system?socket=/run/a' list");
        assert_eq!(address.quoted_name(), r"'it'\''s'");
    }
}
