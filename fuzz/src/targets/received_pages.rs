//! Bitmaps of received pages. The first two bytes are the number of pages.

use sterna_wire::received_pages::ReceivedPages;

/// Feeds one input to the decoder; panics if a check fails.
pub fn target(data: &[u8]) {
    let [high, low, bytes @ ..] = data else { return };
    let pages = u64::from(u16::from_be_bytes([*high, *low]));
    let Ok(Some((received, used))) = ReceivedPages::decode(bytes, pages) else { return };
    assert_eq!(used as u64, ReceivedPages::encoded_bytes(pages));
    assert!((pages..pages + 64).all(|page| !received.has(page)));
    let mut again = Vec::new();
    received.encode(&mut again);
    let (twice, _) = ReceivedPages::decode(&again, pages).unwrap().unwrap();
    assert_eq!(twice, received);
}
