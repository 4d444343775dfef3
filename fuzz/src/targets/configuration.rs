//! Header and configuration: a decoded configuration encodes to the same bytes if its parts are in QEMU's
//! order.

use sterna_wire::main::{Configuration, Expectations, FileHeader};

/// Feeds one input to the decoder; panics if a check fails.
pub fn target(data: &[u8]) {
    let _ = FileHeader::decode(data);
    let Ok(Some((configuration, _))) = Configuration::decode(data) else { return };
    let _ = configuration.check(&Expectations::default());
    let mut again = Vec::new();
    configuration.encode(&mut again).unwrap();
    // The byte after the configuration tells the decoder that no subsection follows.
    again.push(0);
    let (second, used) = Configuration::decode(&again).unwrap().unwrap();
    assert_eq!(second, configuration);
    assert_eq!(used, again.len() - 1);
}
