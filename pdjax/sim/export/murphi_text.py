"""The hand-written part of the Murphi model: state, wire, conditions, effects, environment, properties.

Written from the protocol, not from the Python core: it exists to disagree with it. One P, one D, one room whose legs
come at most once, so attempt, uuid and digest need no numbers: "uuid" is whether one is known. Messages are bits:

P→D: 0 unknown, 1 pending, 2 ready, 3 failed echo 0, 4 failed echo 1, 5 done_ack
D→P: 0–2 hello that acknowledges epoch 0–2, 3 done, 4 + 4·uuid + 2·quiet + foreign: abort
"""

DECLARATIONS = """
type
  life: 0..2;
  room_state: enum { N, B, W, T, S, F };
  early_kind: enum { e_none, e_early_hello, e_early_abort };
  notice_kind: enum { n_none, n_done, n_abort };
  reg_stage: enum { g_none, g_open, g_taken, g_empty, g_closed };
  pull_stage: enum { u_none, u_queued, u_flying, u_reading, u_hung, u_arrived, u_dropped };
  event_name: enum { @EVENTS@ };
  to_d: 0..5;
  to_p: 0..11;
  ev: record
    name: event_name;
    msg: boolean; hello: boolean; abort: boolean; ready: boolean;
    epoch: life; ack: life; uuid: boolean; quiet: boolean; foreign: boolean; echo: boolean;
    late: boolean;
  end;

var
  -- P: the process, then its record of the room
  p_up: boolean; p_life: life; p_link: life; p_minted: boolean; p_crashes: 0..2;
  p_st: room_state; p_bound: boolean; p_peer_epoch: life; p_charged: boolean; p_uuid: boolean;
  p_offer: 0..2; p_registered: boolean; p_t_request: boolean; p_t_lease: boolean; p_t_tombstone: boolean;
  early_own: early_kind; early_own_epoch: life; early_other: early_kind; early_other_epoch: life;
  limbo: boolean; limbo_epoch: life;
  -- D
  d_up: boolean; d_life: life; d_link: life; d_minted: boolean; d_crashes: 0..2;
  d_st: room_state; d_candidate: boolean; d_noted: life; d_out: boolean; d_bound: boolean; d_bound_epoch: life;
  d_manifest: boolean; d_pulling: boolean; d_notice: notice_kind; d_notice_epoch: life;
  d_t_request: boolean; d_t_bootstrap: boolean; d_t_hello: boolean; d_t_notice: boolean; d_t_transfer: boolean;
  d_t_tombstone: boolean;
  d_knows: boolean; d_waiting: boolean; d_answered: boolean;
  -- between them
  pd: array [to_d] of array [1..2] of boolean;
  dp: array [to_p] of array [1..2] of boolean;
  -- transport, pages, legs
  reg: reg_stage; reg_p_life: life; reg_d_epoch: life; reg_waived: boolean;
  pull: pull_stage; pull_epoch: life; pull_abandoned: boolean;
  pages: boolean; lookup: boolean; committed: boolean;
  p_came: boolean; p_waits: boolean; d_came: boolean; d_waits: boolean;
"""

HELPERS = """
function live_p(): boolean; begin return p_st = B | p_st = W | p_st = T; end;
function live_d(): boolean; begin return d_st = B | d_st = W | d_st = T; end;

procedure p_forgets();
begin
  p_bound := false; p_peer_epoch := 0; p_charged := false; p_uuid := false; p_offer := 0; p_registered := false;
  p_t_request := false; p_t_lease := false; p_t_tombstone := false;
end;

procedure d_forgets();
begin
  d_candidate := false; d_noted := 0; d_out := false; d_bound := false; d_bound_epoch := 0; d_manifest := false;
  d_pulling := false; d_notice := n_none; d_notice_epoch := 0; d_t_request := false; d_t_bootstrap := false;
  d_t_hello := false; d_t_notice := false; d_t_transfer := false; d_t_tombstone := false;
end;

procedure s_kept(); begin if p_st = N then p_forgets(); end; end;

procedure r_kept();
begin
  if d_st = N then d_forgets(); end;
  if d_st = N | d_candidate then lookup := false; end;
end;

procedure say_p(m: to_p; l: life);
var n: 0..30;
begin
  if p_up & (d_link = 0 | d_link = p_life) & !dp[m][l] then
    n := 0;
    for i: to_p do for j: 1..2 do if dp[i][j] then n := n + 1; end; end; end;
    if n < WIRE then dp[m][l] := true; end;
  end;
end;

procedure say_d(m: to_d; l: life);
var n: 0..30;
begin
  if d_up & (p_link = 0 | p_link = d_life) & !pd[m][l] then
    n := 0;
    for i: to_d do for j: 1..2 do if pd[i][j] then n := n + 1; end; end; end;
    if n < WIRE then pd[m][l] := true; end;
  end;
end;

-- P answers whoever spoke, or tells the bound D
procedure p_says(e: ev; m: to_d); begin if e.msg | p_bound then say_d(m, p_life); end; end;

procedure withdrawn(); begin if reg != g_none & reg != g_closed then reg := g_empty; end; end;

procedure send_abort(known: boolean; quiet: boolean; foreign: boolean);
var m: to_p;
begin
  m := 4;
  if known then m := m + 4; end;
  if quiet then m := m + 2; end;
  if foreign then m := m + 1; end;
  say_p(m, d_life);
end;

procedure send_notice();
begin
  if d_notice = n_done then say_p(3, d_life);
  elsif d_notice = n_abort then send_abort(d_manifest & d_bound, !d_pulling, false);
  end;
end;

procedure arm_notice(); begin d_t_notice := d_notice != n_none; end;
"""

CONDITIONS = """
function sif_early_hello(e: ev): boolean; begin return early_own = e_early_hello; end;
function sif_early_abort(e: ev): boolean; begin return early_own = e_early_abort; end;
function sif_ack_none(e: ev): boolean; begin return e.hello & e.ack = 0; end;
function sif_ack_foreign(e: ev): boolean; begin return e.hello & e.ack != 0 & e.ack != p_life; end;
function sif_foreign_fingerprint(e: ev): boolean; begin return false; end;
function sif_foreign_digest(e: ev): boolean; begin return e.foreign & !(e.abort & p_bound); end;
function sif_bound(e: ev): boolean;
begin
  if e.name = e_peer_reborn then return p_bound & p_peer_epoch < e.epoch; end;
  return p_bound;
end;
function sif_gated(e: ev): boolean; begin return false; end;
function sif_budget_free(e: ev): boolean; begin return !p_charged & !limbo; end;
function sif_attempt_newer(e: ev): boolean; begin return false; end;
function sif_attempt_older(e: ev): boolean; begin return false; end;
function sif_uuid_mine(e: ev): boolean; begin return p_registered & e.uuid = p_uuid; end;
function sif_uuid_of_my_epoch(e: ev): boolean; begin return e.uuid & p_minted; end;
function sif_quiet(e: ev): boolean; begin return e.quiet; end;

function rif_from_candidate(e: ev): boolean; begin return d_candidate & !d_out; end;
function rif_last_candidate(e: ev): boolean; begin return true; end;
function rif_from_bound(e: ev): boolean; begin return d_bound; end;
function rif_newer_life(e: ev): boolean;
begin
  if d_bound then return e.epoch > d_bound_epoch; end;
  return d_candidate & e.epoch > d_noted;
end;
function rif_agrees(e: ev): boolean; begin return e.ready; end;
function rif_has_uuid(e: ev): boolean; begin return d_manifest; end;
function rif_same_uuid(e: ev): boolean; begin return d_manifest & e.ready; end;
function rif_uuid_mine(e: ev): boolean; begin return d_manifest & e.uuid; end;
function rif_pages_taken(e: ev): boolean; begin return e.name = e_start; end;
function rif_fresh(e: ev): boolean; begin return d_knows & d_answered; end;
function rif_quiet(e: ev): boolean; begin return !d_pulling; end;
function rif_echo(e: ev): boolean; begin return e.echo; end;
function rif_noticed(e: ev): boolean; begin return d_notice != n_none; end;
function rif_notice_epoch(e: ev): boolean; begin return d_notice != n_none & e.epoch >= d_notice_epoch; end;
function rif_no_notice(e: ev): boolean; begin return d_notice = n_none; end;
"""

EFFECTS = """
procedure sdo_answer_duplicate(e: ev); begin end;
procedure sdo_answer_bad(e: ev); begin p_waits := false; end;
procedure sdo_answer_refused(e: ev); begin p_waits := false; end;
procedure sdo_arm_request(e: ev); begin p_t_request := true; end;
procedure sdo_arm_bootstrap(e: ev); begin end;
procedure sdo_bury(e: ev); begin p_t_request := false; p_t_lease := false; p_t_tombstone := true; end;
procedure sdo_forget(e: ev); begin p_t_request := false; p_t_lease := false; p_t_tombstone := false; end;
procedure sdo_engine_stop(e: ev); begin p_waits := false; end;
procedure sdo_remember_early(e: ev);
begin
  if e.foreign then
    early_other := e_early_abort; early_other_epoch := e.epoch;
  else
    if e.abort then early_own := e_early_abort;
    elsif early_own = e_none then early_own := e_early_hello; end;
    early_own_epoch := e.epoch;
  end;
end;
procedure sdo_forget_early(e: ev);
begin
  if e.name = e_early_timer & e.foreign then early_other := e_none; early_other_epoch := 0;
  else
    early_own := e_none; early_own_epoch := 0;
    if e.name != e_early_timer then early_other := e_none; early_other_epoch := 0; end;
  end;
end;
procedure sdo_bind(e: ev); begin p_bound := true; p_peer_epoch := e.epoch; p_t_lease := true; end;
procedure sdo_bind_early(e: ev); begin p_bound := true; p_peer_epoch := early_own_epoch; p_t_lease := true; end;
procedure sdo_renew(e: ev);
begin
  if e.epoch > p_peer_epoch then p_peer_epoch := e.epoch; end;
  p_t_lease := true;
end;
procedure sdo_say_unknown(e: ev); begin p_says(e, 0); end;
procedure sdo_say_pending(e: ev); begin p_says(e, 1); end;
procedure sdo_say_ready(e: ev); begin p_says(e, 2); end;
procedure sdo_say_failed(e: ev); begin p_says(e, 3); end;
procedure sdo_say_failed_echo(e: ev); begin p_says(e, 4); end;
procedure sdo_answer_abort(e: ev); begin if e.quiet then p_says(e, 4); else p_says(e, 3); end; end;
procedure sdo_say_done_ack(e: ev); begin p_says(e, 5); end;
procedure sdo_reserve(e: ev); begin p_charged := true; end;
procedure sdo_keep_arrays(e: ev); begin p_offer := 2; p_uuid := true; p_minted := true; p_t_lease := true; end;
procedure sdo_register(e: ev);
begin
  p_registered := true; p_offer := 1;
  reg := g_open; reg_p_life := p_life; reg_d_epoch := p_peer_epoch; reg_waived := false;
end;
procedure sdo_drop_arrays(e: ev); begin p_offer := 0; end;
procedure sdo_withdraw(e: ev); begin p_offer := 0; withdrawn(); end;
procedure sdo_release_arrays(e: ev); begin p_offer := 0; withdrawn(); end;
procedure sdo_withdraw_again(e: ev); begin if e.uuid & p_minted then withdrawn(); end; end;
procedure sdo_free_budget(e: ev); begin p_charged := false; end;
procedure sdo_to_limbo(e: ev); begin limbo := true; limbo_epoch := p_peer_epoch; p_charged := false; end;
procedure sdo_free_limbo(e: ev);
begin
  if !(e.name = e_peer_reborn & limbo_epoch >= e.epoch) then limbo := false; limbo_epoch := 0; end;
end;
procedure sdo_count_late_done(e: ev); begin end;

procedure rdo_answer_duplicate(e: ev); begin end;
procedure rdo_answer_bad(e: ev); begin d_waits := false; end;
procedure rdo_answer_refused(e: ev); begin d_waits := false; end;
procedure rdo_arm_request(e: ev); begin d_t_request := true; end;
procedure rdo_arm_bootstrap(e: ev); begin d_t_bootstrap := true; end;
procedure rdo_bury(e: ev);
begin
  d_t_request := false; d_t_bootstrap := false; d_t_transfer := false; d_t_hello := false; d_t_tombstone := true;
end;
procedure rdo_forget(e: ev); begin d_forgets(); end;
procedure rdo_engine_stop(e: ev);
begin
  d_waits := false; pages := false;
  if pull = u_arrived then pull := u_none; pull_epoch := 0; pull_abandoned := false; end;
end;
procedure rdo_mint_attempt(e: ev); begin d_minted := true; end;
procedure rdo_lookup(e: ev); begin lookup := true; end;
procedure rdo_note_candidates(e: ev); begin d_candidate := true; d_noted := e.ack; end;
procedure rdo_drop_candidate(e: ev); begin d_out := true; end;
procedure rdo_say_hello(e: ev);
begin
  if d_bound then say_p(d_bound_epoch, d_life);
  elsif d_candidate & !d_out then say_p(0, d_life);
  end;
  if d_bound | (d_candidate & !d_out) then
    if !d_knows then d_answered := false; end;
    d_knows := true; d_waiting := true;
  end;
  if !d_bound then lookup := true; end;
  d_t_hello := true;
end;
procedure rdo_bind_peer(e: ev); begin d_bound := true; d_bound_epoch := e.epoch; d_t_bootstrap := false; d_t_hello := true; end;
procedure rdo_abort_others(e: ev); begin arm_notice(); end;
procedure rdo_notice_abort(e: ev);
begin
  if (e.name = e_candidates & !d_bound) | d_bound | (d_candidate & !d_out) then
    if !(e.name = e_candidates & d_bound) then
      d_notice := n_abort; d_notice_epoch := 0;
      if d_bound then d_notice_epoch := d_bound_epoch; end;
      send_notice();
    end;
  end;
  arm_notice();
end;
procedure rdo_notice_done(e: ev);
begin
  d_pulling := false;
  d_notice := n_done; d_notice_epoch := d_bound_epoch;
  send_notice(); arm_notice();
end;
procedure rdo_notice_again(e: ev);
begin
  if d_notice = n_none then
    if d_st = S then d_notice := n_done; else d_notice := n_abort; end;
    d_notice_epoch := e.epoch;
  end;
  if e.epoch > d_notice_epoch then d_notice_epoch := e.epoch; end;
  send_notice(); arm_notice();
end;
procedure rdo_notice_quiet(e: ev); begin d_pulling := false; send_notice(); arm_notice(); end;
procedure rdo_repeat_notice(e: ev);
begin
  if e.late & !d_pulling then d_notice := n_none; d_notice_epoch := 0; else send_notice(); end;
  arm_notice();
end;
procedure rdo_end_notice(e: ev);
begin
  if d_notice != n_none & !(e.name = e_peer_reborn & e.epoch <= d_notice_epoch) then
    d_notice := n_none; d_notice_epoch := 0; arm_notice();
  end;
end;
procedure rdo_reply_abort(e: ev); begin send_abort(e.ready, true, !e.ready & d_st = N); end;
procedure rdo_renew_tombstone(e: ev); begin d_t_tombstone := true; end;
procedure rdo_note_ready(e: ev); begin d_manifest := true; end;
procedure rdo_start_pull(e: ev);
begin
  d_pulling := true; d_t_transfer := true;
  pull := u_queued; pull_epoch := d_bound_epoch; pull_abandoned := false; pages := true;
end;
procedure rdo_deliver(e: ev); begin d_pulling := false; end;
procedure rdo_abandon_pull(e: ev); begin if d_pulling & pull != u_none then pull_abandoned := true; end; end;
"""

DRIVERS = """
procedure settle(ok: boolean);
var e: ev;
begin
  clear e;
  if ok & d_st = T then pull := u_arrived;
  else pull := u_none; pull_epoch := 0; pull_abandoned := false; end;
  if d_st = T then
    if ok then e.name := e_landed; r_landed(e);
    else d_pulling := false; e.name := e_peer_failed; r_peer_failed(e); end;
  elsif d_st = F then e.name := e_pull_settled; r_pull_settled(e);
  end;
end;

-- D drops the server of one life of P: what was pulled from it settles
procedure d_drops(l: life);
begin
  if (pull = u_flying | pull = u_reading | pull = u_hung) & pull_epoch = l then settle(false); end;
end;

procedure d_peer_down(name: event_name);
var e: ev;
begin
  clear e; e.name := name;
  d_knows := false; d_waiting := false; d_answered := false;
  if d_st != N & (d_bound | d_candidate | d_notice != n_none) then
    if name = e_refused then r_refused(e); else r_peer_silence(e); end;
  end;
  d_drops(d_link);
end;

-- a frame of life l of P; m: its message; bare: none
procedure d_frame(l: life; bare: boolean; m: to_d);
var e: ev; old: life;
begin
  if l >= d_link then
    clear e; e.epoch := l;
    old := d_link;
    if old > 0 & old < l then
      if d_st != N & (d_bound | d_candidate | d_notice != n_none) then e.name := e_peer_reborn; r_peer_reborn(e); end;
    end;
    d_link := l; d_knows := true; d_waiting := false; d_answered := true;
    if !bare then
      e.msg := true;
      switch m
      case 0: e.name := e_unknown; r_unknown(e);
      case 1: e.name := e_pending; r_pending(e);
      case 2: e.name := e_ready; e.ready := true; e.uuid := true; r_ready(e);
      case 3: e.name := e_failed; r_failed(e);
      case 4: e.name := e_failed; e.echo := true; r_failed(e);
      case 5: e.name := e_done_ack; e.uuid := true; r_done_ack(e);
      end;
    end;
    if old > 0 & old < l then d_drops(old); end;
  end;
end;

procedure p_frame(l: life; bare: boolean; m: to_p);
var e: ev; old: life; k: 0..11;
begin
  if l >= p_link then
    clear e; e.epoch := l;
    old := p_link;
    if old > 0 & old < l then
      if (live_p() & p_bound & p_peer_epoch < l) | (limbo & limbo_epoch < l) then
        e.name := e_peer_reborn; s_peer_reborn(e);
      end;
      if reg != g_none & reg_p_life = p_life & reg_d_epoch = old then reg := g_closed; end;
    end;
    p_link := l;
    if !bare then
      e.msg := true;
      if m <= 2 then e.name := e_hello; e.hello := true; e.ack := m; s_hello(e);
      elsif m = 3 then e.name := e_done; e.uuid := true; s_done(e);
      else
        e.name := e_abort; e.abort := true;
        k := m - 4;
        e.uuid := k >= 4;
        e.quiet := k = 2 | k = 3 | k = 6 | k = 7;
        e.foreign := k = 1 | k = 3 | k = 5 | k = 7;
        s_abort(e);
      end;
    end;
  end;
end;

function wire_empty(): boolean;
begin
  for i: to_p do for j: 1..2 do if dp[i][j] then return false; end; end; end;
  for i: to_d do for j: 1..2 do if pd[i][j] then return false; end; end; end;
  return true;
end;

function served(): boolean; begin return p_up & p_life = pull_epoch & reg != g_none & reg != g_closed; end;
"""

RULES = """
startstate
begin
  clear p_st; p_forgets(); clear d_st; d_forgets();
  p_up := true; p_life := 1; p_link := 0; p_minted := false; p_crashes := CRASHES_P;
  d_up := true; d_life := 1; d_link := 0; d_minted := false; d_crashes := CRASHES_D;
  early_own := e_none; early_own_epoch := 0; early_other := e_none; early_other_epoch := 0;
  limbo := false; limbo_epoch := 0;
  d_knows := false; d_waiting := false; d_answered := false;
  for i: to_p do for j: 1..2 do dp[i][j] := false; end; end;
  for i: to_d do for j: 1..2 do pd[i][j] := false; end; end;
  reg := g_none; reg_p_life := 0; reg_d_epoch := 0; reg_waived := false;
  pull := u_none; pull_epoch := 0; pull_abandoned := false;
  pages := false; lookup := false; committed := false;
  p_came := false; p_waits := false; d_came := false; d_waits := false;
end;

ruleset m: to_d; l: 1..2 do
  rule "deliver to D" pd[m][l] & d_up ==> begin pd[m][l] := false; d_frame(l, false, m); end;
  rule "copy to D" DUPLICATE & pd[m][l] & d_up ==> begin d_frame(l, false, m); end;
  rule "lose to D" LOSE & pd[m][l] ==> begin pd[m][l] := false; end;
end;
ruleset m: to_p; l: 1..2 do
  rule "deliver to P" dp[m][l] & p_up ==> begin dp[m][l] := false; p_frame(l, false, m); end;
  rule "copy to P" DUPLICATE & dp[m][l] & p_up ==> begin p_frame(l, false, m); end;
  rule "lose to P" LOSE & dp[m][l] ==> begin dp[m][l] := false; end;
end;
rule "stamp of D" p_up & d_up & 0 < p_link & p_link < d_life ==> begin p_frame(d_life, true, 0); end;
rule "stamp of P" p_up & d_up & 0 < d_link & d_link < p_life ==> begin d_frame(p_life, true, 0); end;

rule "leg of P" !p_came & p_up ==>
var e: ev;
begin clear e; p_came := true; p_waits := true; e.name := e_leg; s_leg(e); end;
rule "leg of D" !d_came & d_up ==>
var e: ev;
begin clear e; d_came := true; d_waits := true; e.name := e_leg; r_leg(e); end;

rule "admit" p_st = B ==> var e: ev; begin clear e; e.name := e_admit; s_admit(e); end;
rule "kv_ready" p_st = W ==>
var e: ev;
begin clear e; e.name := e_kv_ready; s_kv_ready(e); if p_st = T then p_waits := false; end; end;
rule "abort on P" ABORT_P & live_p() ==> var e: ev; begin clear e; e.name := e_abort_local; s_abort_local(e); end;
rule "P request timer" TIMERS & p_t_request ==>
var e: ev;
begin clear e; p_t_request := false; e.name := e_expire_request; s_expire_request(e); end;
rule "P lease timer" TIMERS & p_t_lease ==>
var e: ev;
begin clear e; p_t_lease := false; e.name := e_expire_lease; s_expire_lease(e); end;
rule "P tombstone timer" TIMERS & p_t_tombstone & wire_empty() & !live_d() & d_notice = n_none ==>
var e: ev;
begin clear e; p_t_tombstone := false; e.name := e_tombstone_timer; s_tombstone_timer(e); end;
ruleset other: boolean do
  rule "early timer" TIMERS & (other & early_other != e_none | !other & early_own != e_none) ==>
  var e: ev;
  begin
    clear e; e.name := e_early_timer; e.foreign := other;
    if p_st = N then s_early_timer(e); else sdo_forget_early(e); end;
  end;
end;
rule "limbo timer" TIMERS & limbo & d_st != T ==>
var e: ev;
begin
  clear e; e.name := e_limbo_timer; s_limbo_timer(e);
  if reg != g_none then reg_waived := true; end;
end;

rule "start" d_st = W & d_manifest & !pages ==> var e: ev; begin clear e; e.name := e_start; r_start(e); end;
rule "abort on D" ABORT_D & live_d() ==> var e: ev; begin clear e; e.name := e_abort_local; r_abort_local(e); end;
rule "D request timer" TIMERS & d_t_request ==>
var e: ev;
begin clear e; d_t_request := false; e.name := e_expire_request; r_expire_request(e); end;
rule "D bootstrap timer" TIMERS & d_t_bootstrap ==>
var e: ev;
begin clear e; d_t_bootstrap := false; e.name := e_expire_bootstrap; r_expire_bootstrap(e); end;
rule "D transfer timer" TIMERS & d_t_transfer ==>
var e: ev;
begin clear e; d_t_transfer := false; e.name := e_expire_transfer; r_expire_transfer(e); end;
rule "D hello timer" TIMERS & d_t_hello ==>
var e: ev;
begin clear e; d_t_hello := false; e.name := e_hello_timer; r_hello_timer(e); end;
ruleset late: boolean do
  rule "D notice timer" TIMERS & d_t_notice ==>
  var e: ev;
  begin clear e; d_t_notice := false; e.name := e_notice_timer; e.late := late; r_notice_timer(e); end;
end;
rule "D tombstone timer" TIMERS & d_t_tombstone & wire_empty() ==>
var e: ev;
begin clear e; d_t_tombstone := false; e.name := e_tombstone_timer; r_tombstone_timer(e); end;
rule "silence" TIMERS & d_up & d_knows & d_waiting ==> begin d_peer_down(e_peer_silence); end;
rule "refused" CRASHES_P > 0 & d_up & !p_up & d_st != N & (d_bound | d_candidate | d_notice != n_none) ==>
begin d_peer_down(e_refused); end;

ruleset old: boolean do
  rule "candidates" lookup & !old ==>
  var e: ev;
  begin clear e; lookup := false; e.name := e_candidates; e.ack := p_life; r_candidates(e); end;
end;

rule "issue" pull = u_queued & d_st = T ==> begin pull := u_flying; end;
rule "never issued" pull = u_queued & d_st != T ==> begin settle(false); end;
rule "graveyard" TIMERS & pull != u_none & pull != u_queued & pull_abandoned ==>
var e: ev;
begin
  clear e; e.name := e_peer_failed;
  if d_st = T & d_bound then d_pulling := false; r_peer_failed(e); end;
  d_drops(pull_epoch);
end;
rule "reach" pull = u_flying & served() & reg = g_open ==> begin pull := u_reading; reg := g_taken; end;
rule "fenced" pull = u_flying & served() & reg = g_empty ==> begin settle(false); end;
rule "land" pull = u_reading ==> begin settle(true); end;
rule "broken" (pull = u_flying | pull = u_reading) & !served() ==> begin settle(false); end;
rule "part fails" PART_FAILS & (pull = u_flying | pull = u_reading) & served() ==> begin settle(false); end;
rule "hang" HANGS & (pull = u_flying | pull = u_reading) ==> begin pull := u_hung; end;
rule "scatter" pull = u_arrived & d_st = T ==>
var e: ev;
begin
  clear e; committed := true; d_waits := false; pull := u_none; pull_epoch := 0; pull_abandoned := false;
  e.name := e_scattered; r_scattered(e);
end;
rule "finish" pages & committed & d_st != T ==> begin pages := false; end;

rule "P dies" p_up & p_crashes > 0 ==>
begin
  p_up := false; p_crashes := p_crashes - 1; p_link := 0; p_minted := false; p_st := N; p_forgets();
  early_own := e_none; early_own_epoch := 0; early_other := e_none; early_other_epoch := 0;
  limbo := false; limbo_epoch := 0; p_waits := false;
  for i: to_p do for j: 1..2 do dp[i][j] := false; end; end;
  if reg != g_none then reg := g_closed; end;
end;
rule "P restarts" !p_up ==> begin p_up := true; p_life := p_life + 1; end;
rule "D dies" d_up & d_crashes > 0 ==>
begin
  d_up := false; d_crashes := d_crashes - 1; d_link := 0; d_minted := false; d_st := N; d_forgets();
  d_knows := false; d_waiting := false; d_answered := false;
  for i: to_d do for j: 1..2 do pd[i][j] := false; end; end;
  pull := u_none; pull_epoch := 0; pull_abandoned := false; pages := false; lookup := false; d_waits := false;
end;
rule "D restarts" !d_up ==> begin d_up := true; d_life := d_life + 1; end;
"""

PROPERTIES = """
invariant "S1 registered bytes belong to a live room" reg = g_open -> (p_st = T & p_uuid);
invariant "S1 pages belong to a room that pulls or has committed" pages -> (d_st = T | committed);
invariant "S2 success only after commit" d_st = S -> committed;
invariant "S3 charged exactly while working" p_charged = (p_st = W | p_st = T);
invariant "S3 charged once" !(p_charged & limbo);
invariant "S4 offered and bound is registered" (p_st = T & p_bound) -> p_registered;
invariant "S4 never withdrawn under its room" (p_st = T & p_registered) -> reg != g_empty;
invariant "S4 bytes in flight are paid for"
  (pull = u_reading & p_up & p_life = pull_epoch & reg != g_closed & !(reg_waived & pull_abandoned)) ->
  (p_charged | limbo);
invariant "S13 P succeeds only with D" p_st = S -> committed;
invariant "S17 a pull has pages" d_st = T -> pages;
invariant "V1 a live room has a timer"
  (live_p() -> p_t_request | p_t_lease) & (live_d() -> d_t_request | d_t_bootstrap | d_t_transfer);
invariant "V1 clients are told" p_waits = (p_st = B | p_st = W);
invariant "V1 clients of D are told" d_waits = live_d();
invariant "V2 a notice has a timer" (d_notice != n_none) = d_t_notice;
"""
