//! Small messages: Sterna's own, and the body of `globalstate`.

use sterna_wire::extension::{
    Features, HandedOver, Handover, MemoryAnswer, MemoryOffer, PreemptHello, StatusAnswer, StatusQuestion,
};
use sterna_wire::global_state::GlobalState;

/// Takes one input.
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
    for version in 0..4 {
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
