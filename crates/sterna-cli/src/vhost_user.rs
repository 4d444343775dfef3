//! A virtio device in another process on the command line:
//! `SOCKET[,kind=fs|blk|net][,tag=NAME][,queues=N][,mac=ADDRESS]`.

use std::path::PathBuf;

use sterna_vmm::{DeviceKind, MacAddress, VhostUserOptions};

/// Maximum number of request queues: the same as for a disk of the machine.
const QUEUES_MAX: usize = 8;

/// A parsed device, which has no index in the machine yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VhostUser {
    socket: PathBuf,
    /// The kind of device; without it, the guest does not see the device.
    kind: Option<DeviceKind>,
    /// Number of request queues.
    queues: usize,
}

impl VhostUser {
    /// The machine's options for this device with number `index`.
    pub fn options(&self, index: usize) -> VhostUserOptions {
        let mut options = VhostUserOptions::new(format!("vhost-user/{index}"), &self.socket);
        options.queues = self.kind.as_ref().map_or(1, |kind| kind.queues(self.queues));
        options.kind = self.kind.clone();
        options
    }
}

/// Parses the argument. A comma in the socket's name is written twice.
pub fn parse(text: &str) -> Result<VhostUser, String> {
    // A NUL byte is used as a placeholder, because no file name contains one.
    const COMMA: &str = "\0";
    let text = text.replace(",,", COMMA);
    let mut words = text.split(',').map(|word| word.replace(COMMA, ","));
    let socket = words.next().filter(|path| !path.is_empty()).ok_or("give the back end's socket first")?;
    let (mut kind, mut tag, mut queues, mut mac) = (None, None, None, None);
    for word in words {
        let (name, value) =
            word.split_once('=').ok_or_else(|| format!("`{word}` is not an option: write `name=value`"))?;
        match name {
            "kind" => kind = Some(value.to_owned()),
            "tag" => tag = Some(value.to_owned()),
            "queues" => {
                let count = value.parse().ok().filter(|count| (1..=QUEUES_MAX).contains(count));
                let expects = || format!("queues={value}: a number from 1 to {QUEUES_MAX}");
                queues = Some(count.ok_or_else(expects)?);
            }
            "mac" => mac = Some(value.parse::<MacAddress>()?),
            _ => return Err(format!("unknown option `{name}`: use kind, tag, queues or mac")),
        }
    }
    let of = |name: &str, kinds: &str| Err(format!("`{name}` is for {kinds}"));
    match kind.as_deref() {
        None if queues.is_some() => return of("queues", "kind=fs and kind=blk"),
        Some("net") if queues.is_some_and(|queues| queues > 1) => {
            return of("queues", "kind=fs and kind=blk; a network card has one pair of queues");
        }
        Some("fs") | None if mac.is_some() => return of("mac", "kind=net"),
        Some("blk") if mac.is_some() => return of("mac", "kind=net"),
        Some("blk" | "net") | None if tag.is_some() => return of("tag", "kind=fs"),
        _ => {}
    }
    let kind = match kind.as_deref() {
        None => None,
        Some("fs") => Some(DeviceKind::FileSystem { tag }),
        Some("blk") => Some(DeviceKind::Block),
        Some("net") => Some(DeviceKind::Network { mac: mac.map(|MacAddress(bytes)| bytes) }),
        Some(other) => return Err(format!("kind={other}: fs, blk or net")),
    };
    Ok(VhostUser { socket: socket.into(), kind, queues: queues.unwrap_or(1) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_follow_the_socket() {
        let options = |text: &str| parse(text).unwrap().options(3);

        let fs = options("/run/a,,b,kind=fs,tag=share,queues=2");
        assert_eq!((fs.name.as_str(), fs.socket), ("vhost-user/3", PathBuf::from("/run/a,b")));
        assert_eq!((fs.kind, fs.queues), (Some(DeviceKind::FileSystem { tag: Some("share".to_owned()) }), 3));
        let disk = options("s,queues=4,kind=blk");
        assert_eq!((disk.kind, disk.queues), (Some(DeviceKind::Block), 4));
        let card = options("s,kind=net,mac=52:54:00:00:00:01");
        assert_eq!(
            (card.kind, card.queues),
            (Some(DeviceKind::Network { mac: Some([0x52, 0x54, 0, 0, 0, 1]) }), 2)
        );
        let unseen = options("s");
        assert_eq!((unseen.kind, unseen.queues), (None, 1));
    }

    #[test]
    fn wrong_option_is_named() {
        for (text, says) in [
            ("", "socket first"),
            (",kind=fs", "socket first"),
            ("s,fs", "`fs`"),
            ("s,kind=gpu", "kind=gpu: fs, blk or net"),
            ("s,kind=fs,queues=0", "from 1 to 8"),
            ("s,kind=fs,queues=9", "from 1 to 8"),
            ("s,queues=2", "kind=fs and kind=blk"),
            ("s,kind=net,queues=2", "one pair"),
            ("s,tag=share", "kind=fs"),
            ("s,kind=blk,tag=share", "kind=fs"),
            ("s,kind=fs,mac=52:54:00:00:00:01", "kind=net"),
            ("s,kind=net,mac=1", "six pairs"),
            ("s,cache=none", "`cache`"),
        ] {
            let why = parse(text).unwrap_err();
            assert!(why.contains(says), "{text}: {why}");
        }
    }
}
