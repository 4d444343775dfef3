//! Checks whether a server listens at a Unix socket. The socket's file exists from `bind` on, and a
//! connection before `listen` is refused.

use std::path::Path;

/// Flag of a listening socket in the kernel's list.
const ACCEPTS: u32 = 1 << 16;

/// Whether a process of this network namespace listens at this Unix socket. Makes no connection, because some
/// servers accept only one.
pub fn is_listening(at: &Path) -> bool {
    // Columns: number, references, protocol, flags, type, state, inode, path.
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    sockets.lines().any(|line| {
        let mut words = line.split_whitespace();
        let flags = words.nth(3).and_then(|flags| u32::from_str_radix(flags, 16).ok());
        flags.is_some_and(|flags| flags & ACCEPTS != 0) && words.nth(3).map(Path::new) == Some(at)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_that_is_bound_does_not_listen_yet() {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        assert!(!is_listening(&path));
        let server = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        bind(&server, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        assert!(path.exists() && !is_listening(&path));
        listen(&server, 1).unwrap();
        assert!(is_listening(&path));
        drop(server);
        assert!(path.exists() && !is_listening(&path));
    }
}
