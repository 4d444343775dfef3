//! Where a daemon's Unix socket is, for a connection URI.

use std::path::PathBuf;

/// The sockets of a URI whose daemon runs on this host, best first. Empty for other URIs.
pub(crate) fn candidates(uri: &str) -> Vec<PathBuf> {
    let (base, query) = uri.split_once('?').unwrap_or((uri, ""));
    let Some(path) = ["qemu:///", "qemu+unix:///"].iter().find_map(|head| base.strip_prefix(head)) else {
        return Vec::new();
    };
    if let Some(socket) = query.split('&').find_map(|part| part.strip_prefix("socket=")) {
        return vec![decoded(socket).into()];
    }
    let directories: Vec<PathBuf> = match path {
        "session" => vec![match std::env::var_os("XDG_RUNTIME_DIR") {
            Some(directory) => PathBuf::from(directory).join("libvirt"),
            None => format!("/run/user/{}/libvirt", rustix::process::geteuid().as_raw()).into(),
        }],
        "system" => vec!["/run/libvirt".into()],
        _ => return Vec::new(),
    };
    // The daemon for QEMU alone, then the one for all hypervisors.
    let of = |directory: &PathBuf| ["virtqemud-sock", "libvirt-sock"].map(|name| directory.join(name));
    directories.iter().flat_map(of).collect()
}

/// The URI that the daemon gets: without the way to it.
pub(crate) fn local(uri: &str) -> String {
    let base = uri.split_once('?').map_or(uri, |(base, _)| base);
    base.replacen("qemu+unix:", "qemu:", 1)
}

/// Replaces `%XX` by the byte.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        let code = after.get(..2).and_then(|code| u8::from_str_radix(str::from_utf8(code).ok()?, 16).ok());
        match code.filter(|_| *first == b'%') {
            Some(byte) => (bytes, rest) = ([bytes, vec![byte]].concat(), &after[2..]),
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_of_a_uri() {
        assert_eq!(candidates("qemu:///system?socket=/run/a%3Fb"), [PathBuf::from("/run/a?b")]);
        assert_eq!(candidates("qemu+unix:///system?mode=direct&socket=/x"), [PathBuf::from("/x")]);
        assert_eq!(candidates("qemu:///system")[0], PathBuf::from("/run/libvirt/virtqemud-sock"));
        for other in ["qemu+ssh://h/system", "qemu+tls://h/system", "xen:///system", "qemu:///embed"] {
            assert!(candidates(other).is_empty(), "{other}");
        }
        assert_eq!(local("qemu+unix:///system?socket=/x"), "qemu:///system");
    }
}
