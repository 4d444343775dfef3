//! Header, configuration: what is decoded encodes to the same bytes when its parts stand in QEMU's order.

use sterna_wire::main::{Configuration, Expectations, FileHeader};

/// Takes one input.
pub fn target(data: &[u8]) {
    let _ = FileHeader::decode(data);
    let Ok(Some((configuration, _))) = Configuration::decode(data) else { return };
    let _ = configuration.check(&Expectations::default());
    let mut again = Vec::new();
    configuration.encode(&mut again).unwrap();
    // The byte after it tells that no subsection follows.
    again.push(0);
    let (second, used) = Configuration::decode(&again).unwrap().unwrap();
    assert_eq!(second, configuration);
    assert_eq!(used, again.len() - 1);
}
