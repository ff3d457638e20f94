"""Calls that torch's own list lacks, written out: operators with numbers, Python's own functions, what `torch.nn.functional` composes."""

# By the shapes of the tensors that they take: ``x`` (of both signs), then ``t[1]``, ``t[2]``, ...
WRITTEN = {
    ((4, 6), (4, 6), (6, 6)): """
        x + 2; 2 + x; x - 2; 2 - x; x * 2; 2 * x; x / 2; 2 / (x + 3); x // 2; 5 // (x + 3); x % 2; 5 % (x + 3); x ** 2; 2 ** x; -x; +x
        abs(x); x @ t[2]; t[1] - x; t[1] % x; t[1] / (x + 3); x ** t[1]; sum([x, t[1], x]); sum([x, t[1]], 2); pow(x, 2); pow(2, x)
        x == t[1]; x != 1; x > t[1]; x >= 0; 0 < x; x <= 0; ~(x > 0); (x > 0) & (t[1] > 0.5); (x > 0) | (t[1] > 0.5)
        (x > 0) ^ (t[1] > 0.5); x[0]; x[:, 1:3]; x[..., None]; x[None]; x[1, 2:]; x[[0, 2]]; x[:, ::2]; x[-1]; x[t[1] > 0.5]; len(x) * x
        x.T; x.mT; x.real; x.H; x.data; x.__radd__(t[1]); x.__rmul__(2); x.__rsub__(2); x.__truediv__(2); x.__mod__(2); x.__floordiv__(2)
        x.__pow__(2); x.__matmul__(t[2]); x.__neg__(); x.__add__(1); x.__sub__(t[1]); x.__mul__(t[1]); x.__div__(t[1]); x.__rpow__(2)
        x.__rdiv__(2); x.__iadd__(1); x.__isub__(t[1]); x.__imul__(2); x.__itruediv__(2); x.__idiv__(2); x.__imod__(2)
        x.__ifloordiv__(2); x.__ipow__(2); x.__getitem__(0); x.__pos__(); x.__abs__(); F.tanh(x); F.sigmoid(x); F.relu(x)
        F.relu(x, inplace=True); F.relu_(x); torch.relu(x); torch.relu_(x); x.relu(); x.relu_(); F.relu6(x); F.relu6(x, inplace=True)
        F.hardswish(x); F.hardswish(x, inplace=True); F.hardsigmoid(x); F.hardsigmoid(x, inplace=True); F.silu(x, inplace=True)
        F.mish(x, inplace=True); F.elu_(x); F.elu(x, inplace=True); F.selu_(x); torch.selu(x); torch.selu_(x); F.celu_(x); torch.celu(x)
        torch.celu_(x); F.leaky_relu_(x, 0.1); F.hardtanh_(x); F.hardtanh(x, -0.5, 0.5, inplace=True); F.threshold(x, 0.1, 0.0)
        F.threshold_(x, 0.1, 0.0); torch.threshold(x, 0.1, 0.0); torch.threshold_(x, 0.1, 0.0); F.rrelu(x, 0.1, 0.2)
        F.rrelu_(x, 0.1, 0.2); torch.rrelu(x, 0.1, 0.2); torch.rrelu_(x, 0.1, 0.2); x.prelu(t[2][0, :1]); torch.prelu(x, t[2][0])
        x.hardshrink(); F.softsign(x); F.tanhshrink(x); F.logsigmoid(x); F.softmin(x, -1); F.normalize(x); F.normalize(x, p=1.0, dim=0)
        F.rms_norm(x, (6,)); torch.batch_norm(x, None, None, t[1][0], t[1][1], False, 0.1, 1e-5, False)
        torch.bilinear(x, t[1], t[2].view(1, 6, 6), None); torch.cosine_similarity(x, t[1]); F.cosine_similarity(x, t[1])
        F.pairwise_distance(x, t[1]); torch.pairwise_distance(x, t[1]); torch.chain_matmul(x, t[2], t[2])
        torch.functional.einsum('ij->ji', x); torch.norm_except_dim(x, 2, 0); torch.nuclear_norm(x); torch.frobenius_norm(x, 1)
        x.norm(1); torch.detach(x); x.detach(); torch.detach_copy(x); x.type_as(t[1]); x.type(torch.float64); x.to(torch.float64)
        x.cpu(); x.double().float(); torch.select_copy(x, 0, 1); torch.slice_copy(x, 0, 1, 3); torch.split_copy(x, 2)
        torch.unsafe_split_with_sizes(x, (2, 2)); x.unsafe_split_with_sizes((1, 3)); x.split((1, 3)); x.copy_(t[1])
        x.fill_diagonal_(1.0); x.where(x > 0, t[1]); torch.slogdet(t[2] * x[0]); torch.special.polygamma(1, x + 3)
        torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)
        torch.fake_quantize_per_channel_affine(x, t[1][:, 0], torch.zeros(4, dtype=torch.int32), 0, -128, 127); F.dropout(x, 0.5, False)
        F.alpha_dropout(x, 0.5, False); F.feature_alpha_dropout(x, 0.5, False); torch.dropout(x, 0.5, False)
        torch.alpha_dropout(x, 0.5, False); torch.feature_dropout(x, 0.5, False); torch.feature_alpha_dropout(x, 0.5, False)
        torch.dropout_(x, 0.5, False); torch.native_dropout(x, 0.5, False); torch.kl_div(x, t[1])
        torch.poisson_nll_loss(x, t[1], True, False, 1e-8, 1); torch.binary_cross_entropy_with_logits(x, t[1])
        torch.hinge_embedding_loss(x, t[1]); torch.margin_ranking_loss(x, t[1], t[1]); torch.cosine_embedding_loss(x, t[1], t[1][:, 0])
        torch.triplet_margin_loss(x, t[1], t[1] * 2); torch.lstm_cell(x, (t[1], t[1]), torch.cat([t[2]] * 4), torch.cat([t[2]] * 4))
        torch.gru_cell(x, t[1][:, :2], t[2], t[2][:, :2]); torch.rnn_tanh_cell(x, t[1], t[2], t[2])
        torch.rnn_relu_cell(x, t[1], t[2], t[2]); torch.ops.aten.relu(x); torch.ops.aten.mul.Tensor(x, t[1])
        torch.ops.aten.tanh.default(x); torch.masked.sum(x, 1); torch.masked.softmax(x, 1, mask=x > 0); x.sum(); x.mean(0); x.sum((0, 1))
        x.max(); x.max(1)[0]; x.std(0); x.var(1); x.prod(1); x.addmm_(t[1], t[2]); torch._softmax(x, -1, False)
        torch.nn.init.constant_(x, 0.5); torch.clamp_(x, -0.5, 0.5); x.clamp(min=0.1)
        x.mm(t[2]); x.detach_(); x.swapaxes_(0, 1); x.slice_scatter(t[1][:2], 0, 1, 3)
        torch.cartesian_prod(x[0], t[1][0]); torch.linalg.svdvals(x)
        x[0] = 1.0; y = x
        x[:, 2] = t[1][:, 0]; y = x
        x[x > 0] = 0.25; y = x
        x[1:] += 1.0; y = x
        x += 2; y = x
        x -= t[1]; y = x
        x *= 2; y = x
        x /= t[1]; y = x
        x //= 2; y = x
        x %= 2; y = x
        x **= 2; y = x
        x @= t[2]; y = x
    """,
    ((2, 4, 6), (4, 4, 3), (1, 6, 2), (4,)): """
        F.conv_tbc(x, t[2], t[3][:2]); torch.conv_tbc(x, t[2], t[3][:2])
        torch.convolution(x, t[1], None, (1,), (1,), (1,), False, (0,), 1); F.upsample(x, scale_factor=2)
        F.upsample_nearest(x, scale_factor=2); torch.max_pool1d(x, 2); F.max_pool1d_with_indices(x, 2)
        torch.max_pool1d_with_indices(x, 2); torch.avg_pool1d(x, 2); torch.adaptive_max_pool1d(x, 3)
        F.adaptive_max_pool1d_with_indices(x, 3); torch.adaptive_avg_pool1d(x, 3); F.lp_pool1d(x + 3, 2.0, 2)
        torch.instance_norm(x, None, None, None, None, True, 0.1, 1e-5, False); F.dropout1d(x, 0.5, False)
        torch.native_channel_shuffle(x[..., None], 2); F.native_channel_shuffle(x[..., None], 2)
        F.scaled_dot_product_attention(x, x * 2, x); F.scaled_dot_product_attention(x, x, x, is_causal=True); F.pad(x, (1, 1))
        F.pad(x, (1, 1), mode='reflect'); F.fold(x[:, :, :4], (3, 3), 2); torch.view_as_real_copy(torch.complex(x, x))
        torch.view_as_complex_copy(x.view(2, 4, 3, 2)); x @ x.mT
    """,
    ((2, 4, 6, 6), (4, 4, 3, 3), (2, 3, 3, 2), (4,), (2, 2, 3)): """
        F.upsample(x, scale_factor=2, mode='bilinear', align_corners=True); F.upsample_bilinear(x, scale_factor=2)
        F.upsample_nearest(x, size=9); torch.max_pool2d(x, 2); F.max_pool2d_with_indices(x, 2); F.lp_pool2d(x + 3, 2.0, 2)
        F.adaptive_max_pool2d_with_indices(x, 3); torch.adaptive_max_pool1d(x[0], 3); F.dropout2d(x, 0.5, False)
        torch.pixel_shuffle(x, 2); F.fold(F.unfold(x, 2), (6, 6), 2); torch.grid_sampler(x, t[2], 0, 0, False)
        F.affine_grid(x[:, :2, 0, :3], (2, 4, 3, 3)); torch.affine_grid_generator(x[:, :2, 0, :3], (2, 4, 3, 3), False)
        F.scaled_dot_product_attention(x, x, x); F.pad(x, (1, 1, 1, 1), mode='circular'); x.mean((2, 3)); x.amax((2, 3))
        F.cosine_similarity(x, x * x)
    """,
    ((1, 2, 4, 4, 4), (2, 2, 2, 2, 2), (1, 2, 2, 2, 3)): """
        F.adaptive_avg_pool3d(x, 2); F.adaptive_max_pool3d(x, 2); F.adaptive_max_pool2d(x[0], 2)
        torch.view_as_real(torch.complex(x, x * 2))
        torch.max_pool3d(x, 2); F.max_pool3d_with_indices(x, 2); F.adaptive_max_pool3d_with_indices(x, 2); F.lp_pool3d(x + 3, 2.0, 2)
        F.upsample(x, scale_factor=2, mode='trilinear'); F.dropout3d(x, 0.5, False); F.upsample_nearest(x, scale_factor=2)
    """,
}
