//! The message with which a VMM hands its guest's memory over, and the file of a working set.

use sterna_pager::WorkingSet;
use sterna_pager::handshake::{MOST_REGIONS, decode};

/// Feeds one input to both decoders; panics if a check fails.
pub fn target(data: &[u8]) {
    if let Ok(text) = std::str::from_utf8(data)
        && let Ok(set) = WorkingSet::decode(text)
    {
        assert_eq!(WorkingSet::decode(&set.encode()), Ok(set.clone()));
        assert!(set.runs.iter().all(|(offset, bytes)| offset + bytes <= set.memory_bytes));
    }
    let Ok(Some(handshake)) = decode(data) else { return };
    let regions = &handshake.regions;
    assert!(!regions.is_empty() && regions.len() <= MOST_REGIONS);
    assert!(
        regions.iter().all(|region| region.bytes > 0 && region.bytes.is_multiple_of(handshake.page_bytes))
    );
    let mut by_address: Vec<_> = regions.iter().map(|it| (it.address, it.address + it.bytes)).collect();
    by_address.sort_unstable();
    assert!(by_address.windows(2).all(|pair| pair[0].1 <= pair[1].0), "regions overlap");
    let total = regions.iter().fold(0u64, |sum, region| sum.saturating_add(region.bytes));
    if handshake.check(total).is_ok() {
        let mut next = 0;
        for region in regions {
            assert_eq!(region.offset, next);
            next += region.bytes;
        }
    }
    // The beginning of a message is never a whole one, because it ends with its array.
    let end = data.iter().rposition(|byte| *byte == b']').unwrap_or(0);
    assert_eq!(decode(&data[..end]), Ok(None));
}
