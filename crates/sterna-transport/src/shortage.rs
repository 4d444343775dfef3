//! Advice for an operator whose host lacks descriptors or memory for a connection.

use std::io;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// Advice for an error that means a lack of descriptors or memory. Append it to the text of the error.
///
/// Empty for other errors.
pub fn shortage_advice(error: &io::Error) -> String {
    match Errno::from_io_error(error) {
        Some(Errno::MFILE) => {
            let limit = getrlimit(Resource::Nofile).current;
            let limit = limit.map_or_else(String::new, |limit| format!("{limit} "));
            format!(
                ". This process may have {limit}open files, but a migration needs one for each channel and some more: \
                 raise the limit (`ulimit -n`, systemd's LimitNOFILE=), or use fewer multifd channels"
            )
        }
        Some(Errno::NFILE) => ". The host's limit of open files is reached: raise fs.file-max".to_owned(),
        Some(Errno::NOMEM | Errno::NOBUFS) => {
            ". The host has no memory for it, or this process's limit is reached".to_owned()
        }
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_names_the_limit_that_was_reached() {
        let advice = |error: Errno| shortage_advice(&error.into());

        assert!(advice(Errno::MFILE).contains("ulimit -n"));
        assert!(advice(Errno::NFILE).contains("fs.file-max"));
        assert!(advice(Errno::NOBUFS).contains("memory"));
        assert_eq!(advice(Errno::CONNREFUSED), "");
        assert_eq!(shortage_advice(&io::Error::other("Too many open files")), "");
    }
}
