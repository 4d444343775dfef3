use super::*;

fn sending(ids: &[u64]) -> Sending {
    Sending {
        capacity: 8,
        outstanding: ids.iter().copied().collect(),
        first: 100,
        ready: VecDeque::new(),
        requests: Vec::new(),
        pieces: Vec::new(),
    }
}

fn done(number: u64, status: u32) -> ibv_wc {
    ibv_wc { wr_id: number, status, opcode: IBV_WC_RDMA_WRITE, ..ibv_wc::default() }
}

#[test]
fn completion_frees_the_places_of_all_requests_up_to_it() {
    let mut sending = sending(&[7, 7, 9, 4]);

    sending.complete(&done(102, 0));

    assert_eq!((sending.outstanding.len(), sending.first), (1, 103));
    let ready = sending.ready.pop_front().expect("a completion");
    assert_eq!((ready.id, ready.kind), (9, CompletionKind::Write));
    sending.complete(&done(103, IBV_WC_REM_ACCESS_ERR));
    assert_eq!(sending.ready[0].status, CompletionStatus::RemoteAccess);
    assert!(sending.outstanding.is_empty());
}

#[test]
fn completion_that_no_request_waits_for_is_passed_over() {
    let mut sending = sending(&[7]);

    sending.complete(&done(99, 0));
    sending.complete(&done(101, 0));

    assert_eq!((sending.outstanding.len(), sending.ready.len()), (1, 0));
}

#[test]
fn immediate_is_big_endian_for_the_adapter_only() {
    let operation = Operation::WriteWithImmediate { address: 0x1000, rkey: 5, immediate: 0x0102_0304 };
    let request = SendRequest { id: 1, operation, from: Piece::EMPTY, is_signalled: true };

    let raw = work_request(&request, 42);

    assert_eq!(raw.imm_data.to_ne_bytes(), [1, 2, 3, 4]);
    assert_eq!((raw.wr_id, raw.num_sge, raw.opcode, raw.send_flags), (42, 0, 1, 2));
    assert_eq!((raw.wr.remote_addr, raw.wr.rkey), (0x1000, 5));
    let arrived = ibv_wc { opcode: IBV_WC_RECV_RDMA_WITH_IMM, imm_data: raw.imm_data, ..ibv_wc::default() };
    assert_eq!(completion(1, &arrived, false).kind, CompletionKind::ReceiveImmediate(0x0102_0304));
}
