//! The Debian mirror that the host's own apt uses, with its settings. This tree names no mirror.

use std::process::Command;

use crate::process::{self, Result};
use crate::setup;

/// Settings of the host's apt that a root's apt needs to reach the same mirror.
const INHERITED: [&str; 6] = [
    "Acquire::http::",
    "Acquire::https::",
    "Acquire::Check-",
    "Acquire::Retries",
    "Acquire::ForceIPv",
    "Acquire::Allow",
];

/// A mirror, and apt's settings for it.
#[derive(Debug, PartialEq, Eq)]
pub struct Mirror {
    /// The address of the archive.
    pub address: String,
    /// Keys and values of apt's configuration.
    pub options: Vec<(String, String)>,
}

/// Reads the mirror from this host's apt.
pub fn of_this_host() -> Result<Mirror> {
    if !process::installed("apt-get") {
        return Err("no apt-get here, so no Debian mirror is known".into());
    }
    // apt lists only archives whose package lists have been fetched.
    setup::package_lists("qemu-system-x86")?;
    let format = "$(ORIGIN)|$(LABEL)|$(CODENAME)|$(IDENTIFIER)|$(REPO_URI)";
    let listing = process::output(Command::new("apt-get").args(["indextargets", "--format", format]))?;
    let address = debian_archive(&listing).ok_or("apt's sources here name no Debian archive")?;
    let dump = process::output(Command::new("apt-config").args(["dump", "Acquire"]))?;
    Ok(Mirror { address, options: inherited(&dump) })
}

/// The first archive that is Debian's own. The security archive does not count, because it has no
/// sid.
fn debian_archive(listing: &str) -> Option<String> {
    listing.lines().find_map(|line| {
        let fields: Vec<&str> = line.split('|').collect();
        let [origin, label, _codename, identifier, address] = fields[..] else { return None };
        (origin == "Debian" && label == "Debian" && identifier == "Packages").then(|| address.to_owned())
    })
}

/// The settings to inherit, parsed from lines such as `Acquire::Check-Date "false";`.
fn inherited(dump: &str) -> Vec<(String, String)> {
    dump.lines()
        .filter_map(|line| line.strip_suffix("\";")?.split_once(" \""))
        .filter(|(key, value)| !value.is_empty() && INHERITED.iter().any(|prefix| key.starts_with(prefix)))
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debian_archive_passes_over_security_and_other_vendors() {
        let listing = "Node|Node|x|Packages|http://node.example/\n\
                       Debian|Debian-Security|bookworm-security|Packages|http://a.example/security/\n\
                       Debian|Debian|bookworm|DEP-11|http://b.example/debian/\n\
                       Debian|Debian|bookworm|Packages|http://b.example/debian/\n";

        assert_eq!(debian_archive(listing).as_deref(), Some("http://b.example/debian/"));
        assert_eq!(debian_archive("Node|Node|x|Packages|http://node.example/\n"), None);
    }

    #[test]
    fn inherited_takes_proxies_and_checks_only() {
        let dump = "Acquire \"\";\nAcquire::http::Proxy \"http://p.example:3128\";\nAcquire::http \"\";\n\
                    Acquire::Check-Date \"false\";\nAcquire::Changelogs::URI \"http://c.example\";\n";

        let options = inherited(dump);

        let keys: Vec<&str> = options.iter().map(|(key, _)| key.as_str()).collect();
        assert_eq!(keys, ["Acquire::http::Proxy", "Acquire::Check-Date"]);
    }
}
