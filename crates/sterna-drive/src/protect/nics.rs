//! A machine's network cards from `info network`, and whether a gate can hold their output.

use super::names::{HOLD, PREFIX};
use crate::error::DriveError;

/// A network card and its netdev.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Nic {
    /// Name of the card.
    pub(super) name: String,
    /// Name of the netdev.
    pub(super) netdev: String,
    /// Kind of the netdev, such as `tap`.
    kind: String,
}

/// The cards that have a netdev.
///
/// # Errors
/// The output of a card cannot be held back.
pub(super) fn nics(table: &str) -> Result<Vec<Nic>, DriveError> {
    let mut found: Vec<Nic> = Vec::new();
    let mut card: Option<&str> = None;
    for line in table.lines().map(|line| line.trim_end_matches('\r')) {
        if line == "filters:" {
            continue;
        }
        if let Some((name, kind)) = filter(line) {
            // These kinds pass every packet on. Filters with our prefix were left by a protection and are removed
            // before.
            if !matches!(kind, "filter-dump" | "filter-mirror") && !name.starts_with(PREFIX) {
                return Err(DriveError::Unfit(format!(
                    "the filter {name} ({kind}) delivers packets without passing the protection's filters: delete it, \
                     because the protection includes its function"
                )));
            }
            continue;
        }
        let Some((name, index, kind)) = entry(line) else {
            let hub = line.split_whitespace().next();
            if hub == Some("hub") || line.trim().is_empty() {
                card = None;
                continue;
            }
            return Err(DriveError::Unfit(format!(
                "`info network` contains {line:?}, which this version does not understand. Therefore it is unknown \
                 whether all of the guest's output would be held back"
            )));
        };
        let is_peer = line.starts_with(" \\ ");
        if index > 0 && (kind == "nic" || is_peer) {
            return Err(DriveError::Unfit(format!(
                "the network card {name} has more than one queue, which QEMU's filters do not support: give it \
                 queues=1"
            )));
        }
        match (kind, is_peer) {
            ("nic", false) => card = Some(name),
            ("nic", true) => {
                return Err(DriveError::Unfit(format!(
                    "the network card {name} is connected to a hub: connect it to a separate netdev"
                )));
            }
            (_, false) => card = None,
            ("hubport", true) => {
                return Err(DriveError::Unfit(format!(
                    "the netdev {name} is connected to a hub: connect the card to a separate netdev"
                )));
            }
            ("vhost-user" | "vhost-vdpa", true) => {
                return Err(DriveError::Unfit(format!(
                    "the netdev {name} is {kind}: its packets do not pass through QEMU, so they cannot be held back"
                )));
            }
            (kind, true) => {
                let Some(card) = card else { continue };
                found.push(Nic { name: card.to_owned(), netdev: name.to_owned(), kind: kind.to_owned() });
            }
        }
    }
    Ok(found)
}

/// The difference between `table` and the cards `before`, each with its gate. None if there is none.
pub(super) fn change(table: &str, before: &[Nic]) -> Option<String> {
    let now = match nics(table) {
        Ok(now) => now,
        Err(error) => return Some(error.to_string()),
    };
    if let Some(new) = now.iter().find(|nic| !before.contains(nic)) {
        return Some(format!(
            "the network card {} was plugged or connected to {}: its output is not held back",
            new.name, new.netdev
        ));
    }
    if let Some(old) = before.iter().find(|nic| !now.contains(nic)) {
        return Some(format!("the network card {} was removed", old.name));
    }
    let holds = table.lines().filter_map(filter);
    let gates = holds.filter(|(name, _)| name.starts_with(PREFIX) && name.ends_with(HOLD)).count();
    (gates != before.len())
        .then(|| "another client of QEMU's monitor has removed the gate of a network card".to_owned())
}

impl Nic {
    /// Whether the kernel may transfer its packets past QEMU (`vhost=on`), which the table does not show.
    pub(super) fn may_have_vhost(&self) -> bool {
        self.kind == "tap"
    }
}

/// Name and kind of the filter in a line.
fn filter(line: &str) -> Option<(&str, &str)> {
    let (name, rest) = line.strip_prefix("  - ")?.split_once(": type=")?;
    Some((name, rest.split(',').next()?))
}

/// Name, queue and kind of the card or netdev in a line.
fn entry(line: &str) -> Option<(&str, u32, &str)> {
    let line = line.trim_start_matches(" \\ ");
    let (name, rest) = line.rsplit_once(": index=")?;
    let (index, rest) = rest.split_once(",type=")?;
    let kind = rest.split(',').next()?;
    // The line of a hub's port contains both names: `h0: e1000.0`.
    let name = name.rsplit(": ").next()?;
    Some((name, index.parse().ok()?, kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "n2: index=0,type=dgram,udp=127.0.0.1:45991/127.0.0.1:45992\r\n\
        mynic: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:12:34:56\r\n \
        \\ n0: index=0,type=dgram,udp=/tmp/near:/tmp/far\r\n\
        filters:\r\n  \
        - d0: type=filter-dump,file=/tmp/x,maxlen=65536,position=tail,status=on,insert=behind,netdev=n0,queue=all\r\n  \
        - sterna-gate0-hold: type=filter-redirector,vnet_hdr_support=false,indev=,outdev=c0,netdev=n0,queue=rx\r\n\
        virtio-net-pci.1: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:12:34:58\r\n\
        e1000.0: index=0,type=nic,model=e1000,macaddr=52:54:00:12:34:59\r\n \
        \\ t0: index=0,type=tap,ifname=tap0,script=no,downscript=no\r\n";

    #[test]
    fn cards_with_a_netdev_are_found() {
        let found = nics(TABLE).unwrap();
        let names: Vec<_> =
            found.iter().map(|nic| (nic.name.as_str(), nic.netdev.as_str(), nic.may_have_vhost())).collect();
        assert_eq!(names, [("mynic", "n0", false), ("e1000.0", "t0", true)]);
        assert!(nics("").unwrap().is_empty());
    }

    #[test]
    fn card_that_is_plugged_or_loses_its_gate_is_found() {
        let before = nics(TABLE).unwrap();
        let gate = "filters:\r\n  - sterna-gate1-hold: type=filter-redirector,netdev=t0,queue=rx\r\n";
        let table = format!("{TABLE}{gate}");
        assert_eq!(change(&table, &before), None);
        let plugged = "net5: index=0,type=nic,model=e1000,macaddr=52:54:00:12:34:60\r\n \\ n5: index=0,type=user,net=10\r\n";
        for (table, word) in [
            (format!("{table}{plugged}"), "net5 was plugged"),
            (TABLE.to_owned(), "gate"),
            (table.replace("mynic", "other"), "other was plugged"),
            (
                table.replace(" \\ t0: index=0,type=tap,ifname=tap0,script=no,downscript=no", ""),
                "e1000.0 was removed",
            ),
            ("junk".to_owned(), "does not understand"),
        ] {
            let why = change(&table, &before).unwrap_or_default();
            assert!(why.contains(word), "{word}: {why}");
        }
    }

    #[test]
    fn what_cannot_be_held_back_is_refused() {
        let card = "net0: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:12:34:56\n";
        for (table, word) in [
            (
                "net0: index=0,type=nic,model=v\n \\ n0: index=0,type=tap,fd=1\nnet0: index=1,type=nic,model=v\n",
                "more than one queue",
            ),
            ("hub 0\n \\ h0: e1000.0: index=0,type=nic,model=e1000,macaddr=52:54:00:12:34:57\n", "hub"),
            (&format!("{card} \\ h1: index=0,type=hubport\n"), "hub"),
            (&format!("{card} \\ n0: index=0,type=vhost-user,vhost-user0 to a\n"), "vhost-user"),
            (
                &format!(
                    "{card} \\ n0: index=0,type=user,net=10\nfilters:\n  - r0: type=filter-redirector,netdev=n0\n"
                ),
                "the filter r0",
            ),
            ("something else\n", "does not understand"),
        ] {
            let why = nics(table).unwrap_err().to_string();
            assert!(why.contains(word), "{table}: {why}");
        }
    }
}
