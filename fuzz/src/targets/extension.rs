//! Small messages: Sterna's extension, and the body of `globalstate`.

use sterna_wire::extension::{
    ChannelBinding, Features, HandedOver, Handover, MemoryAnswer, MemoryOffer, MigrationSecret, PreemptHello,
    ReconnectAnswerHead, ReconnectHello, SourceConfiguration, StatusAnswer, StatusQuestion, decode_held,
    encode_held, most_held_bytes,
};
use sterna_wire::global_state::GlobalState;

/// Feeds one input to the decoder; panics if a check fails.
pub fn target(data: &[u8]) {
    let mut again = Vec::new();
    if let Ok(Some((question, used))) = StatusQuestion::decode(data) {
        question.encode(&mut again);
        assert_eq!(again, data[..used]);
    }
    again.clear();
    if let Ok(Some((answer, used))) = StatusAnswer::decode(data) {
        answer.encode(&mut again);
        assert_eq!(again, data[..used]);
    }
    again.clear();
    if let Ok(Some((hello, used))) = PreemptHello::decode(data) {
        hello.encode(&mut again);
        assert_eq!(again, data[..used]);
    }
    again.clear();
    if let Ok(Some((offer, used))) = MemoryOffer::decode(data) {
        offer.encode(&mut again);
        assert_eq!(again, data[..used]);
    }
    again.clear();
    if let Ok(Some((answer, used))) = MemoryAnswer::decode(data) {
        answer.encode(&mut again);
        assert_eq!(again, data[..used]);
    }
    again.clear();
    if let Ok(entries) = HandedOver::decode_table(data) {
        entries.iter().for_each(|entry| entry.encode(&mut again));
        assert_eq!(again, data);
    }
    reconnect(data);
    for version in 0..4 {
        if let Ok(configuration) = SourceConfiguration::decode(version, data) {
            assert_eq!(version, SourceConfiguration::SECTION_VERSION);
            assert_eq!(configuration.encode().unwrap(), data);
        }
        if let Ok(handover) = Handover::decode(version, data) {
            assert_eq!(handover.encode(), (version, data.to_vec()));
        }
    }
    if let Ok(state) = GlobalState::decode(data) {
        assert_eq!(state.encode().unwrap(), data);
    }
    if let Some(bytes) = data.first_chunk::<4>() {
        let value = u32::from_be_bytes(*bytes);
        if let Some(features) = Features::from_pong(value) {
            assert_eq!(features.to_pong(), value);
        }
    }
}

/// The messages of a reconnection: hello, answer, and a list of held pages. The first bytes choose the sizes of
/// the guest's blocks.
fn reconnect(data: &[u8]) {
    let secret = MigrationSecret::from_bytes([7; MigrationSecret::BYTES]);
    let binding: ChannelBinding = None;
    let mut again = Vec::new();
    if let Ok(Some((hello, used))) = ReconnectHello::decode(data) {
        hello.encode(&mut again);
        assert_eq!(again, data[..used]);
        if let Ok(Some((head, used))) = ReconnectAnswerHead::decode(&data[used..], 64) {
            assert!(head.pages_bytes <= 64 && used == ReconnectAnswerHead::BYTES);
            let pages = data.get(used..used + head.pages_bytes as usize).unwrap_or_default().to_vec();
            if let Some(answer) = head.with_pages(pages.clone(), &hello, &secret, &binding) {
                again.clear();
                answer.encode(&hello, &secret, &binding, &mut again);
                assert!(again.ends_with(&pages));
            }
        }
    }
    let Some((sizes, bytes)) = data.split_first_chunk::<2>() else { return };
    let blocks = sizes.map(|size| u64::from(size) * 5);
    let mut runs: [Vec<(u64, u64)>; 2] = Default::default();
    let decoded = decode_held(bytes, &blocks, |block, first, count| {
        assert!(count > 0 && first + count <= blocks[block]);
        runs[block].push((first, count));
    });
    if decoded.is_ok() {
        again.clear();
        for (pages, runs) in blocks.iter().zip(&runs) {
            encode_held(*pages, runs.iter().copied(), &mut again);
        }
        assert_eq!(again, bytes);
        assert!(bytes.len() as u64 <= most_held_bytes(&blocks));
    }
}
